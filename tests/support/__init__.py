"""What several test files share; each module says what it gives."""
