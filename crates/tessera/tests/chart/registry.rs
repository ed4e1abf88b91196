//! The chart and the image in a real OCI registry, by the commands of `docs/install.md`. Needs Debian's packages
//! docker-registry and skopeo.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::{helm, objects, root, template, template_of, text};

/// A registry on this host. Dropping it ends it.
struct Registry {
    program: Child,
    address: String,
}

impl Registry {
    fn start(folder: &Path) -> Self {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap().to_string();
        drop(free);
        let configuration = folder.join("registry.yaml");
        let content = format!(
            "version: 0.1\nlog: {{ level: error }}\nstorage: {{ filesystem: {{ rootdirectory: {} }} }}\nhttp: {{ addr: '{address}' }}\n",
            folder.join("blobs").display()
        );
        std::fs::write(&configuration, content).unwrap();
        let program = Command::new("docker-registry")
            .arg("serve")
            .arg(configuration)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| {
                panic!("this test needs docker-registry; on Debian, install the packages docker-registry and skopeo: {error}")
            });
        let registry = Self { program, address };
        registry.wait_until_it_listens();
        registry
    }

    fn wait_until_it_listens(&self) {
        let end = Instant::now() + Duration::from_secs(60);
        while std::net::TcpStream::connect(&self.address).is_err() {
            assert!(Instant::now() < end, "the registry does not listen on {}", self.address);
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.program.kill().unwrap();
        self.program.wait().unwrap();
    }
}

fn path(file: &Path) -> &str {
    file.to_str().unwrap()
}

#[test]
fn the_chart_renders_from_a_registry_as_from_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let registry = Registry::start(folder.path());
    let version = env!("CARGO_PKG_VERSION");
    text(&helm(&["package", "deploy/chart", "--destination", path(folder.path())]));
    let archive = folder.path().join(format!("tessera-{version}.tgz"));
    let charts = format!("oci://{}/charts", registry.address);
    text(&helm(&["push", path(&archive), &charts, "--plain-http"]));
    let (chart, pulled) = (format!("{charts}/tessera"), folder.path().join("pulled"));
    std::fs::create_dir(&pulled).unwrap();
    let destination = ["--plain-http", "--destination", path(&pulled)];
    text(&helm(&[&["pull", &chart, "--version", version][..], &destination].concat()));
    let archive = pulled.join(format!("tessera-{version}.tgz"));
    let pulled =
        objects(&text(&template_of(path(&archive), "1.36.4", "kube-system", &["monitoring.alerts=true"])));
    let local = objects(&text(&template("1.36.4", "kube-system", &["monitoring.alerts=true"])));
    assert!(!local.is_empty());
    assert!(pulled == local, "the chart of the registry differs");
}

#[test]
fn the_image_is_the_same_in_a_registry() {
    let folder = tempfile::tempdir().unwrap();
    let registry = Registry::start(folder.path());
    let (library, archive) = (folder.path().join("libtessera.so"), folder.path().join("image.tar"));
    std::fs::write(&library, "a library").unwrap();
    let mut build = Command::new(root().join("deploy/image/build"));
    build.args(["--name", "example/tessera:1", "--binary", env!("CARGO_BIN_EXE_tessera"), "--library"]);
    text(&build.arg(&library).arg(&archive).output().unwrap());
    let (from, to) =
        (format!("oci-archive:{}", path(&archive)), format!("docker://{}/tessera:1", registry.address));
    let skopeo = |arguments: &[&str]| text(&Command::new("skopeo").args(arguments).output().unwrap());
    skopeo(&["copy", "--all", "--insecure-policy", "--dest-tls-verify=false", &from, &to]);
    let here = skopeo(&["inspect", "--raw", &from]);
    let there = skopeo(&["inspect", "--raw", "--tls-verify=false", &to]);
    assert_eq!(here, there);
    let config = skopeo(&["inspect", "--config", "--tls-verify=false", &to]);
    assert!(config.contains("/usr/local/bin/tessera"), "{config}");
}
