//! Integration tests of the scheduler: its state under any sequence of events, and its server
//! against an API server.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail like tests")]

mod access;
mod agents;
mod bind;
mod borrowing;
mod claim_evictions;
mod claims;
mod cluster_events;
mod dashboard;
mod documentation;
mod evictions;
mod explain;
mod filter;
mod filter_only;
mod fixtures;
mod forward;
mod gangs;
mod hostile;
mod interleavings;
mod leadership;
mod login;
mod neighbour;
mod node_reservations;
mod pages;
mod passed_pods;
mod preempt;
mod quota;
mod sample;

mod server;
mod tls;
mod webhook;
