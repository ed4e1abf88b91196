//! Links the library with the GNU hash table of exported names only. Every supported glibc reads that
//! table, and the older one would add 2 kB to the library.

fn main() {
    println!("cargo::rustc-link-arg-cdylib=-Wl,--hash-style=gnu");
    println!("cargo::rerun-if-changed=build.rs");
}
