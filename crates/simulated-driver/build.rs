//! Links the simulated driver so that it calls its own functions directly, as the real driver does,
//! and never the hooks of a preloaded library.

#![allow(clippy::print_stdout, reason = "how cargo is told")]

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}
