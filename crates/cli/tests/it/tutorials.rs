//! Runs the commands of `docs/tutorials.md` as they are written there, on the demo with the options that the page names.
//! Needs kubectl.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tessera_demo::DemoOptions;
use tokio::runtime::Runtime;

use crate::stage::GPU;

/// The command with which the page starts the demo, without what starts the program.
const DEMO: &str =
    "$ cargo run --release -- demo --scenario stream --pods 0 --kubeconfig-out /tmp/kubeconfig";

/// Words in a tutorial that the demo cannot play, because it has no controllers.
const NEEDS_CLUSTER: &str = "needs a real cluster";

/// What the commands print, by a part of the command. A command with none needs to succeed.
const EXPECTED: [(&str, &[&str]); 11] = [
    ("apply -f examples/notebooks-on-one-gpu.yaml", &["notebook-ada created", "notebook-grace created"]),
    ("inspect gpu overview", &["6 nodes, 48 GPUs: 98% free"]),
    ("delete -f examples/notebooks-on-one-gpu.yaml", &["\"notebook-ada\" deleted"]),
    ("apply -f examples/mig-instance.yaml", &["created"]),
    ("explain mig-instance", &["requests nvidia.com/mig-1g.10gb, which no node offers"]),
    ("what-if", &["fits on 6 of 6 nodes"]),
    ("apply -f examples/quota.yaml", &["pod/homework created", "pod/late-homework created"]),
    ("-n students describe pods", &["QuotaExceeded", "ExceedsGPUQuota"]),
    ("delete pod homework", &["\"homework\" deleted"]),
    ("apply -f examples/priorities.yaml", &["pod/production created"]),
    ("top --sort waste", &["default/production"]),
];

/// A demo that ends with the test.
struct Demo {
    folder: TempDir,
    _runtime: Runtime,
}

impl Demo {
    fn start() -> Self {
        let folder = TempDir::new().unwrap();
        std::os::unix::fs::symlink(GPU, folder.path().join("kubectl-inspect-gpu")).unwrap();
        let options = DemoOptions {
            nodes: 6,
            machine_models: tessera_demo::built_in_models(),
            pods_per_second: Some(0.0),
            steps: false,
            seed: 1,
            speed: 1.0,
            listen: ([127, 0, 0, 1], 0).into(),
            kubeconfig_out: Some(folder.path().join("kubeconfig")),
            duration: None,
        };
        let runtime = Runtime::new().unwrap();
        let (said, introduced) = mpsc::channel();
        let say = move |text: &str| said.send(text.to_owned()).unwrap_or_default();
        runtime.spawn(async move {
            let ended = tessera_demo::run(options, say, std::future::pending()).await;
            panic!("the demo has ended: {ended:?}");
        });
        introduced.recv_timeout(Duration::from_secs(60)).unwrap();
        Self { folder, _runtime: runtime }
    }

    /// Runs a command line of kubectl from the root of the repository. Returns whether it succeeded, and what it printed.
    fn kubectl(&self, line: &str) -> (bool, String) {
        let words = line.strip_prefix("$ kubectl ").unwrap().split_whitespace();
        let others = std::env::var_os("PATH").unwrap();
        let folders = std::iter::once(self.folder.path().to_owned()).chain(std::env::split_paths(&others));
        let mut program = Command::new("kubectl");
        program.args(words).current_dir(root()).env("PATH", std::env::join_paths(folders).unwrap());
        let output = program.env("KUBECONFIG", self.folder.path().join("kubeconfig")).output();
        let output = output.unwrap_or_else(|error| {
            panic!("this test needs kubectl in PATH; on Debian, install kubernetes-client: {error}")
        });
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned() + &error)
    }

    /// Runs a command line until it prints these parts. Commands that change objects run once.
    fn prints(&self, line: &str, parts: &[&str]) {
        let changes =
            ["$ kubectl apply ", "$ kubectl delete ", " delete pod "].iter().any(|verb| line.contains(verb));
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let (succeeded, text) = self.kubectl(line);
            if succeeded && parts.iter().all(|part| text.contains(part)) {
                return;
            }
            assert!(!changes && Instant::now() < end, "{line}: {text}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the command lines in the code blocks of a text.
fn commands(text: &str) -> impl Iterator<Item = &str> {
    let blocks = text.split("```").skip(1).step_by(2);
    blocks.flat_map(str::lines).filter(|line| line.starts_with("$ "))
}

#[test]
fn the_commands_of_the_tutorials_run_on_the_demo() {
    let page = std::fs::read_to_string(root().join("docs/tutorials.md")).unwrap();
    let mut tutorials = page.split("\n## ");
    let introduction: Vec<&str> = commands(tutorials.next().unwrap()).collect();
    assert_eq!(introduction, [DEMO, "$ export KUBECONFIG=/tmp/kubeconfig"]);
    let demo = Demo::start();
    let mut ran = Vec::new();
    for tutorial in tutorials.filter(|tutorial| !tutorial.contains(NEEDS_CLUSTER)) {
        for line in commands(tutorial) {
            let known = EXPECTED.iter().find(|(part, _)| line.contains(part));
            let (part, expected) = known.unwrap_or_else(|| panic!("what does this print? {line}"));
            demo.prints(line, expected);
            ran.push(*part);
        }
    }
    assert_eq!(ran, EXPECTED.map(|(part, _)| part), "every command runs, in the order of the page");
    // As the page says, the pod that waited for the quota runs now.
    demo.prints("$ kubectl -n students get pods", &["Running"]);
}
