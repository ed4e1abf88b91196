//! The container image of `deploy/image/build`: runtimes can read it, and it runs with nothing but
//! its own files.

#![allow(clippy::unwrap_used, reason = "test helpers may panic like tests")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn build(library: &Path, out: &Path) {
    output(
        Command::new(root().join("deploy/image/build"))
            .args(["--name", "example/tessera:1"])
            .args(["--binary", env!("CARGO_BIN_EXE_tessera")])
            .args([Path::new("--library"), library, out]),
    );
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Returns the file of a descriptor. Verifies that its name is its checksum, as registries do.
fn blob(layout: &Path, descriptor: &Value) -> PathBuf {
    let (_, sum) = descriptor["digest"].as_str().unwrap().split_once(':').unwrap();
    let path = layout.join("blobs/sha256").join(sum);
    assert!(output(Command::new("sha256sum").arg(&path)).starts_with(sum), "{}", path.display());
    assert_eq!(fs::metadata(&path).unwrap().len(), descriptor["size"].as_u64().unwrap());
    path
}

#[test]
fn the_image_is_complete_and_reproducible() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (library, archive, again) = (at("libtessera.so"), at("image.tar"), at("again.tar"));
    fs::write(&library, "a library").unwrap();
    build(&library, &archive);
    build(&library, &again);
    assert!(fs::read(&archive).unwrap() == fs::read(&again).unwrap(), "two images of the same files differ");

    let (layout, inside) = (at("layout"), at("inside"));
    fs::create_dir_all(&layout).unwrap();
    fs::create_dir_all(&inside).unwrap();
    output(Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(&layout));
    let index = json(&layout.join("index.json"));
    assert_eq!(index["manifests"][0]["annotations"]["io.containerd.image.name"], "example/tessera:1");
    let manifest = json(&blob(&layout, &index["manifests"][0]));
    let config = json(&blob(&layout, &manifest["config"]));
    let packed = blob(&layout, &manifest["layers"][0]);
    assert_eq!(config["config"]["Entrypoint"][0], "/usr/local/bin/tessera");
    let docker = json(&layout.join("manifest.json"));
    assert_eq!(layout.join(docker[0]["Layers"][0].as_str().unwrap()), packed);

    output(Command::new("tar").arg("-xzf").arg(packed).arg("-C").arg(&inside));
    assert_eq!(fs::read(inside.join("usr/local/bin/libtessera.so")).unwrap(), b"a library");
    let needed = output(Command::new("ldd").arg(env!("CARGO_BIN_EXE_tessera")));
    let loader = needed.split_whitespace().find(|word| word.contains("/ld-")).unwrap();
    let here = |path: &str| inside.join(path.trim_start_matches('/'));
    let folders: Vec<PathBuf> = needed
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
        .map(|path| here(path).parent().unwrap().to_owned())
        .collect();
    let version = output(
        Command::new(here(loader))
            .arg("--library-path")
            .arg(std::env::join_paths(folders).unwrap())
            .arg(here("/usr/local/bin/tessera"))
            .arg("--version"),
    );
    assert_eq!(version.trim(), format!("tessera {}", env!("CARGO_PKG_VERSION")));

    let bill = json(&at("image.cdx.json"));
    assert_eq!(bill, json(&at("again.cdx.json")), "two bills of the same files differ");
    assert_eq!((&bill["bomFormat"], &bill["specVersion"]), (&"CycloneDX".into(), &"1.5".into()));
    assert_eq!(bill["metadata"]["component"]["name"], "tessera");
    let names: Vec<&str> = bill["components"]
        .as_array()
        .unwrap()
        .iter()
        .map(|component| component["name"].as_str().unwrap())
        .collect();
    assert!(["tessera-interpose", "tokio", loader].iter().all(|name| names.contains(name)), "{names:?}");
}
