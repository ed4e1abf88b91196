//! `tessera inventory` with a driver whose GPU awaits a reset for retired memory.

use std::path::Path;
use std::process::Command;

/// Builds the simulated driver and returns the folder with its NVML.
fn driver() -> tempfile::TempDir {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    // The cargo that runs the tests may lock its own target directory.
    let target = crate_folder.join("../../target/under-test");
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--offline", "--profile", "interpose", "-p", "tessera-simulated-driver"])
        .args(["--target-dir".as_ref(), target.as_os_str()])
        .current_dir(crate_folder)
        .status();
    assert!(built.unwrap().success());
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(target.join("interpose/libsimulated_driver.so"), folder.path().join("libnvidia-ml.so.1"))
        .unwrap();
    folder
}

#[test]
fn a_reset_that_is_pending_is_found_on_all_generations_and_on_gpus_in_mig_mode() {
    let driver = driver();
    let inventory = |variables: &[(&str, &str)]| {
        let output = Command::new(env!("CARGO_BIN_EXE_tessera"))
            .arg("inventory")
            .env("LD_LIBRARY_PATH", driver.path())
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        text
    };
    let awaiting = "NUMA node unknown, awaiting a reset for retired memory";
    let instance = "  MIG 1g.10gb: MIG-";
    // Pages on GPUs before the A100, rows since then.
    for kind in ["pages", "rows"] {
        let text = inventory(&[("SIMULATED_PENDING_RESET", kind)]);
        assert!(text.contains(awaiting), "{kind}: {text}");
        let text = inventory(&[("SIMULATED_PENDING_RESET", kind), ("SIMULATED_MIG", "1g.10gb")]);
        assert!(text.contains(awaiting) && text.contains(instance), "{kind}: {text}");
    }
    let text = inventory(&[]);
    assert!(text.contains("NVIDIA Simulated") && !text.contains("awaiting"), "{text}");
    let text = inventory(&[("SIMULATED_MIG", "1g.10gb")]);
    assert!(text.contains("NUMA node unknown, in MIG mode") && text.contains(instance), "{text}");
}
