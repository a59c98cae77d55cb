"""What packlora is compared with: PEFT's layers and batches, and the formulas of Scaling-DoRA."""
