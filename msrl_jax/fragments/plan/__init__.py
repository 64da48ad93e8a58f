"""What a program will do, before it runs: plans, costs, collectives, devices that are not there."""
