"""What packlora is compared with: PEFT's layers, and the formulas of Scaling-DoRA."""
