"""How far a compiled graph may be from the eager model: fixed per precision, kept in every manifest.

`float32` is the proof: quantisers are off, so nothing amplifies the last bits. In `native` precision one
flipped bit becomes an FP8 step and, layers later, another expert, so the end of the model is checked coarsely
and every sublayer sharply, on equal inputs.
"""

MARGIN = "decision_margin"  # rows whose narrowest choice is closer than this are reported apart
EXCLUDED_SHARE = "excluded_share"  # how many rows that may be
LOGITS_MAX_ABS = "logits_max_abs"  # largest difference of a logit
LOGITS_RMS = "logits_rms_ratio"  # root mean square of the difference, per standard deviation of the logits
LOGITS_COSINE = "logits_median_cosine"  # median over rows of the cosine, at least this
SUBLAYER_RMS = "sublayer_rms_ratio"  # per sublayer on equal inputs, per root mean square of its result
WINDOW_RMS = "window_rms_ratio"  # when is a layer's window record called different

TOLERANCES: dict[str, dict[str, float]] = {
    "float32": {MARGIN: 1e-4, EXCLUDED_SHARE: 0.2, LOGITS_MAX_ABS: 1e-4, WINDOW_RMS: 2e-6},
    "native": {
        MARGIN: 1e-4,
        EXCLUDED_SHARE: 0.2,
        LOGITS_MAX_ABS: 1e-4,
        LOGITS_RMS: 0.4,
        LOGITS_COSINE: 0.95,
        SUBLAYER_RMS: 2e-3,
        WINDOW_RMS: 2e-2,
    },
}
