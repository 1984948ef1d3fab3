"""Measurements of dart, in folders by subject; README.md says for each the claim, the command and the result."""
