//! Integration tests of the scheduler: its state under any sequence of events, and its server
//! against an API server.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail like tests")]

mod dashboard;
mod documentation;
mod fixtures;
mod hostile;
mod interleavings;
mod pages;
mod server;
mod tls;
mod verbs;
