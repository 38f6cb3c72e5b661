"""What every process of Tandem does when it starts and ends: bind its port, die with its parent."""
