//! Checks that the committed gRPC code matches the `.proto` files, so that no build of Tessera
//! needs a protobuf compiler.
//!
//! After a change to a `.proto` file, run
//! `BLESS=1 cargo test -p tessera-wire --test kubelet_codegen`.

use std::{fs, path::Path};

const PROTOS: [&str; 6] = [
    "deviceplugin_v1beta1.proto",
    "dra_health_v1alpha1.proto",
    "dra_v1.proto",
    "gpu_manager_display.proto",
    "pluginregistration_v1.proto",
    "podresources_v1.proto",
];

#[test]
fn committed_code_matches_the_protos() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let generated = tempfile::tempdir().unwrap();
    for proto in PROTOS {
        let descriptors = protox::compile([root.join("proto").join(proto)], [root.join("proto")]).unwrap();
        tonic_prost_build::configure().out_dir(generated.path()).compile_fds(descriptors).unwrap();
    }

    let committed = root.join("src/kubelet/gen");
    let mut packages = 0;
    for entry in fs::read_dir(generated.path()).unwrap() {
        let fresh_path = entry.unwrap().path();
        let committed_path = committed.join(fresh_path.file_name().unwrap());
        let fresh = fs::read_to_string(&fresh_path).unwrap();
        if std::env::var_os("BLESS").is_some() {
            fs::write(&committed_path, &fresh).unwrap();
        }
        let current = fs::read_to_string(&committed_path).unwrap_or_default();
        assert!(current == fresh, "{} is out of date: run this test with BLESS=1", committed_path.display());
        packages += 1;
    }
    assert_eq!(packages, PROTOS.len());
}
