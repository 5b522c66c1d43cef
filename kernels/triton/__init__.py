"""GPU kernels in Triton: one module per operation with its kernel and its launcher, named as the operation.

A launcher takes the operation's own arguments and returns its results; `Op.triton` finds it by name. Nothing
outside this package imports triton, so a machine without it imports and runs everything else. Tensors live on
a CUDA device, or on the CPU where TRITON_INTERPRET=1 was set before the import. Values of arguments are not
checked (that would wait for the device): the host checks block tables and positions before it launches.

Tiles and splits follow from widths alone, never from the number of rows, so a row's bits do not depend on
its company. Rows are addressed with 64 bits.
"""
