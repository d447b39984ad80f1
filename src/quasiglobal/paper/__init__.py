"""The paper's figures and tables, by name."""
