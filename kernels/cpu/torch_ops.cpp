// All that needs torch's headers, as one translation unit: reading them takes longer than compiling one of these.

#include "graph_runner.cpp"
#include "ops.cpp"
#include "ops_attention.cpp"
#include "ops_engram.cpp"
#include "ops_gate.cpp"
#include "ops_gemm.cpp"
#include "ops_index.cpp"
#include "ops_records.cpp"
#include "ops_sample.cpp"
#include "ops_streams.cpp"
