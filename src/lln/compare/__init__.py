"""`lln compare`: mechanisms side by side on the same inputs: cost, concentration, and how near to softmax they come."""
