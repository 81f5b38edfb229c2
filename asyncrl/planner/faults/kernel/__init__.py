"""Processes in virtual time: tasks, calls, and what becomes of them when a process stops or dies."""
