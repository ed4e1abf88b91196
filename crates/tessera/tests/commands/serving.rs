//! The program serves at the address it reports.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Stdio};

use super::{command, mistakes::kubeconfig_without_server};

/// Kills the program, also when the test fails.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Starts the program, waits for a line with `says` and the address in it, and returns the answer
/// to a request for `path`.
fn page(arguments: &[&str], says: &str, path: &str) -> String {
    let child = command(arguments).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut running = Running(child);
    // The test stops reading after that line, which must not disturb the program.
    let lines = BufReader::new(running.0.stderr.take().unwrap()).lines();
    let line = lines.map(Result::unwrap).find(|line| line.contains(says)).unwrap();
    let (_, rest) = line.split_once("http://").unwrap();
    let address = rest.split('/').next().unwrap();
    assert!(!address.ends_with(":0"), "{line}");
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn port_0_is_replaced_by_the_actual_port() {
    let (kubeconfig, grants) = (kubeconfig_without_server(), tempfile::tempdir().unwrap());
    let kubeconfig = kubeconfig.path().to_str().unwrap();
    let anywhere = ["--listen", "127.0.0.1:0"];
    let gpus = ["--gpus", "simulated:dgx1.txt"];
    let metrics = [&["metrics"][..], &gpus, &anywhere].concat();
    assert!(page(&metrics, "serving ", "/metrics").contains("\ntessera_"));
    let scheduler = ["scheduler", "--kubeconfig", kubeconfig, "--insecure-listen", "127.0.0.1:0"];
    let others = ["--dashboard-listen", "127.0.0.1:0", "--health-listen", "127.0.0.1:0"];
    let scheduler = [&scheduler[..], &others].concat();
    for (says, path) in
        [(" listening ", "/readyz"), ("answering probes", "/healthz"), ("dashboard", "/version")]
    {
        assert!(page(&scheduler, says, path).starts_with("HTTP/1.0 "), "{says}");
    }
    let grants = grants.path().to_str().unwrap();
    let agent = ["agent", "--node-name", "n", "--grants", grants, "--kubeconfig", kubeconfig];
    let probes = ["--probes-listen", "127.0.0.1:0"];
    let agent = [&agent[..], &["--kubelet-root", grants], &gpus, &anywhere, &probes].concat();
    assert!(page(&agent, "answering probes", "/healthz").contains("ok"));
    let open = [&agent[..], &["--pages-access", "open"]].concat();
    assert!(page(&open, "serving pages ", "/version").contains("\"version\""));
}
