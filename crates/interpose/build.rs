//! One table of exported names is enough: every glibc that the library runs on reads the newer one. The older would be 2 kB more in
//! each container.

fn main() {
    println!("cargo::rustc-link-arg-cdylib=-Wl,--hash-style=gnu");
    println!("cargo::rerun-if-changed=build.rs");
}
