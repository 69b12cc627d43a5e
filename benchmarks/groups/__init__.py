"""What tp_cost measures with."""
