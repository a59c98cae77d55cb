"""Training on several devices: who takes part, what they agree on, who trains what."""
