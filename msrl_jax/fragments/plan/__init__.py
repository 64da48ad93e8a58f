"""What a program will do, before it runs: plans, costs, collectives, and planning for devices that you do not have."""
