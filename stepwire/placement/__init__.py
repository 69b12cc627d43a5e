"""Workers on machines that a cluster manager chooses."""
