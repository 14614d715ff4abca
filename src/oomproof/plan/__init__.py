"""The cheapest change that makes a run fit."""
