"""One file each; ``plan.technique.techniques`` finds them."""
