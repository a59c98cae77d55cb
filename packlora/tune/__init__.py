"""`packlora tune`, a plug-in: measure sizes of kernels and plans on this device, and write the files that the chooser reads."""
