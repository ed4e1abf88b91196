//! The arbiter on virtual time, beside tenants that report whatever helps them.

#![allow(clippy::unwrap_used, reason = "test helpers may panic like tests")]

mod accounts;
mod liars;
mod world;
