"""An accelerator without hardware: a device of torch whose memory is the host's.

``torch.backends``, the entry points that torch loads when it is imported, is how real ones come.
The test writes such an entry point into a folder, for the PYTHONPATH of the processes that have it.
"""
