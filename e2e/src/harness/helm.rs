//! Helm and kubectl, as an administrator runs them, and the image that ships.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use tokio::process::Command;

use super::{Cluster, Harness, RealNode, image, shipped::deploy};

impl Cluster {
    /// Runs helm with the rights of an administrator and returns its output.
    pub(crate) async fn helm(&self, arguments: &[&str]) -> Result<String> {
        let folder = self.harness.state("helm")?;
        let mut command = Command::from(self.harness.kubernetes("helm").arguments(arguments).command());
        for place in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
            command.env(place, &folder);
        }
        self.run("helm", arguments, command).await
    }

    /// Runs kubectl with the rights of an administrator and returns its output.
    pub(crate) async fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new("kubectl");
        command.args(arguments);
        self.run("kubectl", arguments, command).await
    }

    /// Runs a shell script with the rights of an administrator. The script ends with its first line that fails.
    pub(crate) async fn shell(&self, script: &str) -> Result<String> {
        let mut command = Command::new("bash");
        command.args(["-eu", "-c", script]);
        self.run("bash", &[script], command).await
    }

    async fn run(&self, program: &str, arguments: &[&str], mut command: Command) -> Result<String> {
        command.env("KUBECONFIG", self.kubeconfig("admin", "system:masters")?);
        let output = command.output().await.with_context(|| program.to_owned())?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{program} {}: {}", arguments.join(" "), complaint.trim());
        Ok(String::from_utf8(output.stdout)?)
    }
}

impl Harness {
    /// Loads an image with kube-scheduler.
    pub(crate) fn load_kube_scheduler_image(&self, node: &RealNode, name: &str) -> Result<()> {
        self.load_program(node, name, "bin/kube-scheduler", &self.programs().join("kubernetes"))
    }

    /// Loads an image with one static program at `place`.
    pub(crate) fn load_program(
        &self,
        node: &RealNode,
        name: &str,
        place: &str,
        program: &Path,
    ) -> Result<()> {
        let archive = self.state("image")?.join("program.tar");
        image::write_program(&archive, name, place, program)?;
        node.import_image(self, &archive)
    }

    /// Builds the image that ships, from the program and the library under test, and loads it under these names.
    pub(crate) fn load_shipped_image(&self, nodes: &[&RealNode], names: &[&str]) -> Result<()> {
        let archive: PathBuf = self.state("image")?.join("tessera.tar");
        let program = self.tessera()?.command().get_program().to_owned();
        for name in names {
            let mut build = std::process::Command::new(deploy().join("image/build"));
            build.args(["--name", name, "--binary"]).arg(&program);
            let built =
                build.arg("--library").arg(self.for_containers("libtessera.so")?).arg(&archive).output()?;
            ensure!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
            nodes.iter().try_for_each(|node| node.import_image(self, &archive))?;
        }
        Ok(())
    }
}
