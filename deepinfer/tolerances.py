"""How far a compiled graph may be from the eager model: fixed per precision, kept in every manifest.

`float32` is the proof: quantisers are off, so nothing amplifies the last bits. In `native` precision one
flipped bit becomes an FP8 step and, layers later, another expert, so the end of the model is checked coarsely
and every sublayer sharply, on equal inputs.
"""

from collections.abc import Mapping

MARGIN = "decision_margin"  # rows whose narrowest choice is closer than this are reported apart
EXCLUDED_SHARE = "excluded_share"  # how many rows that may be
LOGITS_MAX_ABS = "logits_max_abs"  # largest difference of a logit
LOGITS_RMS = "logits_rms_ratio"  # root mean square of the difference, per standard deviation of the logits
LOGITS_COSINE = "logits_median_cosine"  # median over rows of the cosine, at least this
SUBLAYER_RMS = "sublayer_rms_ratio"  # per sublayer on equal inputs, per root mean square of its result
RECORD_RMS = "record_rms_ratio"  # the same for quantised records, where one value may be a step off
WINDOW_RMS = "window_rms_ratio"  # when is a layer's window record called different

# Measured with 8 layers. float32, correct graphs: logits up to 3.3e-6, window records 2.4e-7 (layer 0) to
# 5.9e-7; the mildest known mistake, one Sinkhorn iteration fewer, gives logits 8e-4 and window records 3.4e-5
# in the first layer behind it. native, correct graphs: sublayers up to 5.2e-4, records up to 1e-7; a Sinkhorn
# with a row pass too many gives up to 9.5e-3 in its layer.
TOLERANCES: dict[str, dict[str, float]] = {
    "float32": {MARGIN: 1e-4, EXCLUDED_SHARE: 0.2, LOGITS_MAX_ABS: 1e-4, WINDOW_RMS: 4e-6},
    "native": {
        MARGIN: 1e-4,
        EXCLUDED_SHARE: 0.2,
        LOGITS_MAX_ABS: 1e-4,
        LOGITS_RMS: 0.4,
        LOGITS_COSINE: 0.95,
        SUBLAYER_RMS: 2e-3,
        RECORD_RMS: 2e-2,
        WINDOW_RMS: 2e-2,
    },
}


def strictest(recorded: Mapping[str, float], precision: str) -> dict[str, float]:
    """Return the stricter of an artifact's recorded limits and this version's, limit by limit.

    A manifest is data from elsewhere: it may tighten a comparison, it cannot loosen one.
    """
    own = TOLERANCES[precision]
    return {
        name: (max if name == LOGITS_COSINE else min)(value, recorded.get(name, value))
        for name, value in own.items()
    }
