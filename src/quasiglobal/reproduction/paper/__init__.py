"""Tables, figures and claims of the paper: published numbers, reproduction and comparison."""
