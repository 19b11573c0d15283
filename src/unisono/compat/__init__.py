"""Drop-in modules with other libraries' names: a repository changes one import."""
