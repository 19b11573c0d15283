"""The pytest plug-in: tests whose bodies run in several ranks."""
