//! `deploy/release` and `deploy/krew/package`: the files of a version are complete and the same each time. Stand-ins take
//! the place of the compilers, so that nothing is built.

#![allow(clippy::unwrap_used, reason = "test helpers may panic like tests")]

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::Value;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Where the files would be published.
const URL: &str = "https://example.com/tessera";

/// Stands for cargo: writes small files where a build would write programs. Everything else is done by the real cargo.
const CARGO: &str = r#"#!/bin/sh
if [ "$1" != zigbuild ]; then exec "$REAL_CARGO" "$@"; fi
shift
while [ $# -gt 0 ]; do
    case $1 in
        --target) target=${2%.2.17} ;;
        --profile) profile=$2 ;;
        --package) package=$2 ;;
    esac
    shift
done
folder=${CARGO_TARGET_DIR:-target}/$target/$profile
mkdir -p "$folder"
case $package in
    tessera) cp "$STAND_INS/program-${target%%-*}" "$folder/tessera" ;;
    tessera-interpose) echo "a library for $target" >"$folder/libtessera.so" ;;
    tessera-cli) for plugin in gpu gpushare; do echo "$plugin for $target" >"$folder/kubectl-inspect-$plugin"; done ;;
esac
"#;

/// Stands for rustup: has the targets of Linux.
const RUSTUP: &str = "#!/bin/sh\ncase $3 in *-linux-*) ;; *) exit 1 ;; esac\n";

/// Stands for git: the time of the last commit.
const GIT: &str = "#!/bin/sh\necho 1700000000\n";

/// Stands for strip of another architecture: copies, or leaves the file as it is.
const STRIP: &str = "#!/bin/sh\nif [ \"$1\" = -o ]; then cp \"$3\" \"$2\"; fi\n";

/// Stands for helm: packs the chart.
const HELM: &str = "#!/bin/sh\ntar -czf \"$4/tessera-$STAND_IN_VERSION.tgz\" --transform 's/^chart/tessera/' -C deploy chart\n";

/// A copy of the sources in which a release is made, with the stand-ins.
struct Release {
    folder: tempfile::TempDir,
}

impl Release {
    fn prepare() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let release = Self { folder };
        let (sources, stand_ins) = (release.at("sources"), release.at("stand-ins"));
        fs::create_dir(&sources).unwrap();
        fs::create_dir(&stand_ins).unwrap();
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for part in ["Cargo.toml", "Cargo.lock", "LICENSE", "rust-toolchain.toml", "deploy", "crates", "e2e"]
        {
            run(Command::new("cp").arg("-r").arg(root.join(part)).arg(&sources));
        }
        for (name, script) in [
            ("cargo", CARGO),
            ("cargo-zigbuild", CARGO),
            ("rustup", RUSTUP),
            ("git", GIT),
            ("helm", HELM),
            ("aarch64-linux-gnu-strip", STRIP),
            ("x86_64-linux-gnu-strip", STRIP),
        ] {
            let file = stand_ins.join(name);
            fs::write(&file, script).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        }
        // The script reads what programs of this machine are linked to. Others are linked to nothing.
        for (machine, number) in [("x86_64", 0x3e), ("aarch64", 0xb7)] {
            let file = stand_ins.join(format!("program-{machine}"));
            if machine == std::env::consts::ARCH {
                fs::copy("/bin/true", file).unwrap();
            } else {
                fs::write(file, header(number)).unwrap();
            }
        }
        release
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs a script of the copy.
    fn script(&self, name: &str, arguments: &[&str]) -> Output {
        let stand_ins = self.at("stand-ins");
        let path = format!("{}:{}", stand_ins.display(), std::env::var("PATH").unwrap());
        Command::new(self.at("sources").join(name))
            .args(arguments)
            .env("PATH", path)
            .env("REAL_CARGO", env!("CARGO"))
            .env("HELM", stand_ins.join("helm"))
            .env("STAND_INS", &stand_ins)
            .env("STAND_IN_VERSION", VERSION)
            .env_remove("CARGO_TARGET_DIR")
            .env_remove("SDKROOT")
            .output()
            .unwrap()
    }
}

/// Returns the header of an ELF file for this machine, without sections and segments.
fn header(machine: u8) -> Vec<u8> {
    let mut header = vec![0; 64];
    header[..7].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1, 1]);
    (header[16], header[18], header[20]) = (3, machine, 1);
    (header[52], header[54], header[58]) = (64, 56, 64);
    header
}

fn run(command: &mut Command) -> String {
    text(&command.output().unwrap())
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Returns the checksums of the files in a folder, by name.
fn sums(folder: &Path) -> BTreeMap<String, String> {
    let names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let sums = run(Command::new("sha256sum").args(&names).current_dir(folder));
    let pairs = sums.lines().map(|line| line.split_once("  ").unwrap());
    pairs.map(|(sum, name)| (name.to_owned(), sum.to_owned())).collect()
}

fn members(archive: &Path) -> Vec<String> {
    run(Command::new("tar").arg("-tzf").arg(archive)).lines().map(str::to_owned).collect()
}

/// Checks the manifest for krew against the archives in the folder.
fn check_plugin(folder: &Path, plugin: &str) {
    let manifest = fs::read_to_string(folder.join(format!("inspect-{plugin}.yaml"))).unwrap();
    let manifest: Value = serde_saphyr::from_str(&manifest).unwrap();
    let spec = &manifest["spec"];
    assert_eq!(manifest["metadata"]["name"], format!("inspect-{plugin}"));
    assert_eq!(spec["version"], format!("v{VERSION}"));
    let sums = sums(folder);
    let platforms = spec["platforms"].as_array().unwrap();
    let machines: Vec<&Value> = platforms.iter().map(|one| &one["selector"]["matchLabels"]["arch"]).collect();
    assert_eq!(machines, ["amd64", "arm64"]);
    for (platform, machine) in platforms.iter().zip(["amd64", "arm64"]) {
        let archive = format!("kubectl-inspect-{plugin}-linux-{machine}.tar.gz");
        assert_eq!(platform["selector"]["matchLabels"]["os"], "linux");
        assert_eq!(platform["uri"], format!("{URL}/{archive}"));
        assert_eq!(platform["sha256"], sums[&archive]);
        let program = format!("kubectl-inspect-{plugin}");
        assert_eq!(platform["bin"], program);
        assert_eq!(members(&folder.join(archive)), [program, "LICENSE".to_owned()]);
    }
}

#[test]
fn a_release_is_complete_and_reproducible() {
    let release = Release::prepare();
    let (first, second) = (release.at("first"), release.at("second"));
    for folder in [&first, &second] {
        text(&release.script("deploy/release", &[folder.to_str().unwrap(), URL]));
    }
    let made = sums(&first);
    assert_eq!(made, sums(&second), "two releases of the same sources differ");
    let of_version = |name: &str| format!("tessera-{VERSION}{name}");
    let expected = [
        "SHA256SUMS".to_owned(),
        "inspect-gpu.yaml".to_owned(),
        "inspect-gpushare.yaml".to_owned(),
        "kubectl-inspect-gpu-linux-amd64.tar.gz".to_owned(),
        "kubectl-inspect-gpu-linux-arm64.tar.gz".to_owned(),
        "kubectl-inspect-gpushare-linux-amd64.tar.gz".to_owned(),
        "kubectl-inspect-gpushare-linux-arm64.tar.gz".to_owned(),
        "kubectl-inspect-linux-amd64.cdx.json".to_owned(),
        "kubectl-inspect-linux-arm64.cdx.json".to_owned(),
        of_version("-image.cdx.json"),
        of_version("-image.tar"),
        of_version("-linux-amd64.tar.gz"),
        of_version("-linux-arm64.tar.gz"),
        of_version(".tgz"),
    ];
    assert_eq!(made.keys().collect::<Vec<_>>(), expected.iter().collect::<Vec<_>>());
    let written = fs::read_to_string(first.join("SHA256SUMS")).unwrap();
    assert_eq!(written.lines().count(), expected.len() - 1);
    for line in written.lines() {
        let (sum, name) = line.split_once("  ").unwrap();
        assert_eq!(made[name], sum, "{name}");
    }
    for plugin in ["gpu", "gpushare"] {
        check_plugin(&first, plugin);
    }
    let programs = members(&first.join(of_version("-linux-arm64.tar.gz")));
    assert_eq!(programs, ["tessera", "libtessera.so", "LICENSE"]);
    let chart = members(&first.join(of_version(".tgz")));
    assert!(chart.contains(&"tessera/Chart.yaml".to_owned()), "{chart:?}");
    check_image(&release, &first.join(of_version("-image.tar")));
}

/// Builds take long, so what is missing is named before the first one.
#[test]
fn a_target_that_cannot_be_installed_is_named_with_the_reason() {
    let release = Release::prepare();
    let refusing = "#!/bin/sh\ncase $3 in aarch64-*) echo 'error: no network' >&2; exit 1 ;; esac\n";
    fs::write(release.at("stand-ins/rustup"), refusing).unwrap();
    let refused = release.script("deploy/release", &[release.at("files").to_str().unwrap(), URL]);
    let complaint = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success(), "{complaint}");
    let expected = "release: rustup cannot install aarch64-unknown-linux-gnu: error: no network";
    assert!(complaint.contains(expected), "{complaint}");
    assert!(!release.at("sources/target").exists(), "something was built");
}

/// The index of the image has one manifest for each architecture, and each has the files of its own.
fn check_image(release: &Release, archive: &Path) {
    let layout = release.at("layout");
    fs::create_dir(&layout).unwrap();
    run(Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(&layout));
    let blob = |descriptor: &Value| {
        let (_, sum) = descriptor["digest"].as_str().unwrap().split_once(':').unwrap();
        layout.join("blobs/sha256").join(sum)
    };
    let json = |path: &Path| -> Value { serde_json::from_slice(&fs::read(path).unwrap()).unwrap() };
    let index = json(&blob(&json(&layout.join("index.json"))["manifests"][0]));
    assert_eq!(index["mediaType"], "application/vnd.oci.image.index.v1+json");
    let manifests = index["manifests"].as_array().unwrap();
    let machines: Vec<&Value> = manifests.iter().map(|one| &one["platform"]["architecture"]).collect();
    assert_eq!(machines, ["amd64", "arm64"]);
    for (descriptor, target) in manifests.iter().zip(["x86_64", "aarch64"]) {
        let manifest = json(&blob(descriptor));
        let config = json(&blob(&manifest["config"]));
        assert_eq!(config["architecture"], descriptor["platform"]["architecture"]);
        let inside = release.at(target);
        fs::create_dir(&inside).unwrap();
        let layer = blob(&manifest["layers"][0]);
        run(Command::new("tar").arg("-xzf").arg(layer).arg("-C").arg(&inside));
        let library = fs::read_to_string(inside.join("usr/local/bin/libtessera.so")).unwrap();
        assert_eq!(library, format!("a library for {target}-unknown-linux-gnu\n"));
    }
}

#[test]
fn the_plugins_are_packed_for_the_given_targets_only() {
    let release = Release::prepare();
    let folder = release.at("plugins");
    let folder = folder.to_str().unwrap();
    let target = "x86_64-unknown-linux-musl";
    text(&release.script("deploy/krew/package", &[folder, URL, target]));
    let made = sums(Path::new(folder));
    assert!(made.contains_key("kubectl-inspect-gpu-linux-amd64.tar.gz"), "{made:?}");
    assert!(!made.keys().any(|name| name.contains("arm64") || name.contains("windows")), "{made:?}");
    let refused = release.script("deploy/krew/package", &[folder, URL, "x86_64-pc-windows-gnu"]);
    let complaint = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success(), "{complaint}");
    for part in ["rustup cannot install this target", "nothing was built", "aarch64-unknown-linux-musl"] {
        assert!(complaint.contains(part), "{complaint}");
    }
}
