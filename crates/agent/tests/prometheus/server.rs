//! Runs Prometheus and promtool of Debian's package `prometheus`.

use std::{
    io::Write as _,
    net::SocketAddr,
    path::Path,
    process::{Child, Command, Stdio},
};

use serde_json::Value;

use super::common::load::{fetch, free_address, poll_foreign};

const INSTALL: &str = "cannot be started; install Debian's package prometheus (apt-get install prometheus)";

/// A page that Prometheus scrapes.
pub(crate) struct Job<'a> {
    pub(crate) name: &'a str,
    pub(crate) path: &'a str,
    pub(crate) target: SocketAddr,
    /// Lines of `metric_relabel_configs`, or empty.
    pub(crate) relabelings: &'a str,
}

/// A Prometheus that scrapes pages every second.
pub(crate) struct Prometheus {
    process: Child,
    address: SocketAddr,
    _directory: tempfile::TempDir,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ended = self.process.kill();
        let _ended = self.process.wait();
    }
}

impl Prometheus {
    pub(crate) fn start(jobs: &[Job<'_>], rules: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let address = free_address();
        let job = |Job { name, path, target, relabelings }: &Job<'_>| {
            format!(
                "  - job_name: {name}\n    metrics_path: {path}\n    honor_labels: true\n    static_configs: [{{ targets: ['{target}'] }}]\n{relabelings}"
            )
        };
        let jobs: String = jobs.iter().map(job).collect();
        let configuration = format!(
            "global: {{ scrape_interval: 1s, evaluation_interval: 1s }}\nrule_files: [rules.yaml]\nscrape_configs:\n{jobs}"
        );
        std::fs::write(directory.path().join("prometheus.yaml"), configuration).unwrap();
        std::fs::write(directory.path().join("rules.yaml"), rules).unwrap();
        let log = std::fs::File::create(directory.path().join("log")).unwrap();
        let process = Command::new("prometheus")
            .arg("--config.file=prometheus.yaml")
            .arg("--storage.tsdb.path=data")
            .arg(format!("--web.listen-address={address}"))
            .current_dir(directory.path())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("prometheus {INSTALL}: {error}"));
        Self { process, address, _directory: directory }
    }

    /// Returns the current result of a query. Panics if Prometheus rejects the query.
    pub(crate) async fn query(&self, query: &str) -> Vec<Value> {
        self.query_with(query, "").await
    }

    /// Returns the result of a query for a time at which nothing was scraped.
    #[allow(dead_code, reason = "not every user of this module needs it")]
    pub(crate) async fn query_without_data(&self, query: &str) -> Vec<Value> {
        self.query_with(query, "time=1&").await
    }

    async fn query_with(&self, query: &str, parameters: &str) -> Vec<Value> {
        let path = format!("/api/v1/query?{parameters}query={}", encoded(query));
        let (_, body) =
            fetch(self.address, &path, "").await.unwrap_or_else(|| panic!("Prometheus rejected {query}"));
        let answer: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(answer["status"], "success", "{query}: {answer}");
        answer["data"]["result"].as_array().unwrap().clone()
    }

    /// Waits until a query has a result.
    pub(crate) async fn until_some(&self, query: &str) {
        let path = format!("/api/v1/query?query={}", encoded(query));
        poll_foreign(query, async || {
            let (_, body) = fetch(self.address, &path, "").await?;
            let answer: Value = serde_json::from_slice(&body).ok()?;
            let is_found = !answer["data"]["result"].as_array()?.is_empty();
            is_found.then_some(())
        })
        .await;
    }

    /// Returns all alerting rules with their state.
    pub(crate) async fn rules(&self) -> Vec<Value> {
        let (_, body) = fetch(self.address, "/api/v1/rules", "").await.unwrap();
        let answer: Value = serde_json::from_slice(&body).unwrap();
        let groups = answer["data"]["groups"].as_array().unwrap();
        groups.iter().flat_map(|group| group["rules"].as_array().unwrap().clone()).collect()
    }
}

/// Runs promtool and panics if it fails.
pub(crate) fn promtool(directory: &Path, arguments: &[&str], input: Option<&str>) {
    let mut process = Command::new("promtool")
        .args(arguments)
        .current_dir(directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("promtool {INSTALL}: {error}"));
    process.stdin.take().unwrap().write_all(input.unwrap_or_default().as_bytes()).unwrap();
    let output = process.wait_with_output().unwrap();
    let said =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "promtool {arguments:?}: {said}");
}

fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}
