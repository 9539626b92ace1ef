"""The reference trainer: equality, kills, stalls, rate, distillation."""
