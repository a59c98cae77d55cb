"""One model on several devices. What a run does with them is runtime's; each file here is one way to spread the work."""
