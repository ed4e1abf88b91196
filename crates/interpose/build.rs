//! Links the library with the GNU hash table of exported names only. Every supported glibc reads that
//! table, and the older one would add 2 kB to the library.
//!
//! The library refers to its own functions directly. Another preloaded library may export the same
//! names; its functions would otherwise be taken for the hooks, and would call themselves.

fn main() {
    println!("cargo::rustc-link-arg-cdylib=-Wl,--hash-style=gnu");
    println!("cargo::rustc-link-arg-cdylib=-Wl,-Bsymbolic");
    println!("cargo::rerun-if-changed=build.rs");
}
