"""Doors to other array libraries; each adapter imports its own framework and no other."""
