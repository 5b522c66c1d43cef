"""GPU kernels in CUDA C++, where Triton cannot be fast: `.cu` sources, their compiler, and how they start.

Sources need no header, so NVRTC compiles them alone: for a card that need not be there, or for the one of
this process. Which calls they serve is data, `choice.json`, read by `choice.py`.
"""
