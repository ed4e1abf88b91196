//! The kubectl plugins with a real kubectl, a real API server and a user without rights.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{
    Site,
    front::Front,
    pods::{asking, gpu_node, share},
};
use crate::harness::Harness;

const PLUGINS: [(&str, &str); 4] = [
    ("kubectl-inspect-gpu", "kubectl-inspect-gpu"),
    ("kubectl-inspect-gputopology", "kubectl-inspect-gpu"),
    ("kubectl-inspect-gpushare", "kubectl-inspect-gpushare"),
    ("kubectl_complete-inspect-gpu", "kubectl-inspect-gpu"),
];

pub(crate) async fn run(harness: Harness) -> Result<()> {
    let nodes = [gpu_node("gib-1", 2, "GiB"), gpu_node("gib-2", 2, "GiB")];
    let site = Site::start(&harness, nodes.into_iter()).await?;
    let replica = site.replica("tessera-scheduler", None)?;
    site.ready(&replica).await?;
    let front = Front::start(vec![replica.addresses]).await?;
    let _kube_scheduler = site.kube_scheduler(&front).await?;
    let kubectl = Kubectl::install(&site)?;

    for (node, mut pod) in
        [("gib-1", asking("six", &[("aliyun.com/gpu-mem", "6")])), ("gib-2", share("half", 50))]
    {
        let only_there = [("kubernetes.io/hostname".to_owned(), node.to_owned())].into();
        pod.spec.get_or_insert_default().node_selector = Some(only_there);
        site.make(&pod).await?;
        site.bound(&pod.metadata.name.unwrap_or_default()).await?;
    }
    what_is_shown(&site, &kubectl)?;
    the_event_and_the_explanation_agree(&site, &kubectl).await?;
    a_user_without_rights(&site, &kubectl).await?;
    a_scheduler_that_is_asked(&site, &kubectl, &format!("http://{}", replica.addresses.pages))
}

/// A kubectl with the plugins of this build on its path.
pub(super) struct Kubectl {
    folder: PathBuf,
    admin: PathBuf,
}

impl Kubectl {
    pub(super) fn install(site: &Site) -> Result<Self> {
        let folder = site.harness.state("plugins")?;
        let built = std::env::current_exe()?;
        for (name, program) in PLUGINS {
            let program = built.with_file_name(program);
            ensure!(program.exists(), "{} is missing: start this through e2e/run", program.display());
            std::os::unix::fs::symlink(program, folder.join(name))?;
        }
        Ok(Self { folder, admin: site.cluster.kubeconfig("admin", "system:masters")? })
    }

    /// Returns the output for the administrator, whatever the exit code.
    pub(super) fn run(&self, arguments: &[&str]) -> Result<Output> {
        self.run_as(&self.admin, arguments)
    }

    fn run_as(&self, kubeconfig: &Path, arguments: &[&str]) -> Result<Output> {
        self.command(kubeconfig, arguments)?.output().context("cannot run kubectl")
    }

    /// Returns a call of kubectl.
    pub(super) fn command(&self, kubeconfig: &Path, arguments: &[&str]) -> Result<Command> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let folders = std::iter::once(self.folder.clone()).chain(std::env::split_paths(&path));
        let mut command = Command::new("kubectl");
        command.args(arguments).env("PATH", std::env::join_paths(folders)?).env("KUBECONFIG", kubeconfig);
        Ok(command)
    }

    /// Returns the output for the administrator.
    pub(super) fn text(&self, arguments: &[&str]) -> Result<String> {
        let output = self.run_as(&self.admin, arguments)?;
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "kubectl {arguments:?}: {errors}");
        Ok(String::from_utf8(output.stdout)?)
    }
}

fn what_is_shown(site: &Site, kubectl: &Kubectl) -> Result<()> {
    let summary = kubectl.text(&["inspect", "gpu"])?;
    ensure!(summary == "NAME   ALLGPU  USEDGPU\ngib-1  2       1\ngib-2  2       1\n", "{summary}");
    ensure!(kubectl.text(&["inspect", "gputopology"])? == summary, "both names must run the same program");
    let details = kubectl.text(&["inspect", "gpu", "-d"])?;
    ensure!(details.starts_with("gpu policy: tessera\n"), "the policy of the lease is missing: {details}");
    let shares = kubectl.text(&["inspect", "gpushare", "-d"])?;
    ensure!(shares.contains("\nsix ") && shares.contains("\nhalf "), "{shares}");
    let json: Value = serde_json::from_str(&kubectl.text(&["inspect", "gpu", "-o", "json"])?)?;
    ensure!(json["nodes"].as_array().is_some_and(|nodes| nodes.len() == 2), "{json}");
    ensure!(
        kubectl.text(&["inspect", "gpu", "what-if", "aliyun.com/gpu-mem=4"])?.contains("would fit now"),
        "what-if"
    );
    let completed = kubectl.text(&["__complete", "inspect", "gpu", "gib"])?;
    ensure!(completed == "gib-1\ngib-2\n:4\n", "{completed}");
    site.harness.note(&format!("kubectl inspect gpu and gpushare:\n{summary}{shares}"));
    Ok(())
}

async fn the_event_and_the_explanation_agree(site: &Site, kubectl: &Kubectl) -> Result<()> {
    let cases = [
        // kube-scheduler itself counts GPUs of one resource and finds two on each node.
        ("too-many", vec![("aliyun.com/gpu", "2")], "fewer than 2 idle GPUs"),
        ("too-large", vec![("aliyun.com/gpu-mem", "20")], "no GPU has 20480 MiB"),
        ("no-room", vec![("tencent.com/vcuda-core", "60"), ("tencent.com/vcuda-memory", "70")], "no GPU"),
    ];
    for (name, asked, text) in cases {
        site.make(&asking(name, &asked)).await?;
        site.refused(name, text).await?;
        let condition = site
            .cluster
            .pods()
            .get(name)
            .await?
            .status
            .and_then(|status| status.conditions)
            .unwrap_or_default();
        let event = condition.into_iter().find(|condition| condition.type_ == "PodScheduled");
        let event = event.and_then(|condition| condition.message).unwrap_or_default();
        let answer: Value =
            serde_json::from_str(&kubectl.text(&["inspect", "gpu", "explain", name, "-o", "json"])?)?;
        let views = answer["nodes"].as_array().cloned().unwrap_or_default();
        let reasons: BTreeSet<String> =
            views.iter().filter_map(|view| view["reason"].as_str()).map(str::to_owned).collect();
        ensure!(reasons.len() == 1 && views.len() == 2, "{name}: {answer}");
        for reason in &reasons {
            ensure!(event.contains(&format!("2 {reason}")), "{name}: {reason:?} is not in {event:?}");
        }
        ensure!(answer["kubeScheduler"]["message"] == event.as_str(), "{answer}");
        site.harness.note(&format!("{name}: kube-scheduler reports {event:?}, explain reports {reasons:?}"));
        site.cluster.pods().delete(name, &kube::api::DeleteParams::default().grace_period(0)).await?;
    }
    Ok(())
}

async fn a_user_without_rights(site: &Site, kubectl: &Kubectl) -> Result<()> {
    let jane = site.cluster.kubeconfig("jane", "visitors")?;
    let refused = kubectl.run_as(&jane, &["inspect", "gpu"])?;
    let output = String::from_utf8(refused.stderr)?;
    ensure!(refused.status.code() == Some(1) && refused.stdout.is_empty(), "{output}");
    let first = r#"Error from server (Forbidden): nodes is forbidden: User "jane" cannot list resource "nodes" in API group "" at the cluster scope"#;
    ensure!(output.lines().next() == Some(first), "{output}");
    // The remedy in the message works.
    let remedies: Vec<&str> =
        output.lines().filter_map(|line| line.trim().strip_prefix("kubectl ")).collect();
    ensure!(remedies.len() == 2, "{output}");
    for remedy in remedies {
        let remedy = remedy.replace("YOU", "jane");
        kubectl.text(&remedy.split_whitespace().collect::<Vec<_>>())?;
    }
    site.cluster.wait_for_rights("jane").await?;
    let allowed = kubectl.run_as(&jane, &["inspect", "gpushare"])?;
    ensure!(allowed.status.success(), "{}", String::from_utf8_lossy(&allowed.stderr));
    site.harness.note(&format!("a user without rights gets:\n{output}"));
    Ok(())
}

fn a_scheduler_that_is_asked(site: &Site, kubectl: &Kubectl, endpoint: &str) -> Result<()> {
    let by_api = kubectl.text(&["inspect", "gpu"])?;
    let by_scheduler = kubectl.text(&["inspect", "gpu", "--endpoint", endpoint])?;
    ensure!(by_api == by_scheduler, "{by_api} and {by_scheduler}");
    site.harness.note("the scheduler and the API server show the same");
    Ok(())
}
