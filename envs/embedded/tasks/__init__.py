"""Task templates: each is a class whose instances are one seeded episode."""
