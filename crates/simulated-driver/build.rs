//! Like the real driver, this one calls its own functions directly, not those that a library in front of it puts in their place.

#![allow(clippy::print_stdout, reason = "how cargo is told")]

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}
