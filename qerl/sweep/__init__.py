"""Many runs of one recipe, one after another: a grid of settings times seeds."""
