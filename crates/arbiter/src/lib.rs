//! Hands out time windows on shared cards.
