"""An accelerator without hardware: a device of torch whose memory is the host's.

Real ones are registered by entry points ``torch.backends``, which torch loads when it is imported.
The test writes such an entry point into a folder on the PYTHONPATH of processes with the device.
"""
