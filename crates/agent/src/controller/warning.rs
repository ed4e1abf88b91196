//! Warnings for the log: a fixed message and structured fields.

use std::fmt;

use tessera_core::{gpu::GpuUuid, units::NodeName};
use tessera_wire::foreign::objects::Pod;

use super::pods::display_name;

/// A warning for the log. The message is fixed text, so that it can be searched for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// What failed, and what happens next or what to do.
    pub message: &'static str,
    /// Node that the warning is about.
    pub node: Option<String>,
    /// Pod that the warning is about, as `namespace/name`.
    pub pod: Option<String>,
    /// Container of that pod.
    pub container: Option<String>,
    /// UUID of the GPU that the warning is about.
    pub gpu: Option<String>,
    /// Values that explain the warning.
    pub detail: Option<String>,
    /// Cause of the failure.
    pub error: Option<String>,
}

impl Warning {
    pub(super) fn new(message: &'static str) -> Self {
        Self { message, node: None, pod: None, container: None, gpu: None, detail: None, error: None }
    }

    pub(super) fn node(self, node: &NodeName) -> Self {
        Self { node: Some(node.to_string()), ..self }
    }

    pub(super) fn pod(self, pod: &Pod) -> Self {
        self.pod_name(display_name(pod))
    }

    /// Sets the pod by its `namespace/name`.
    pub(super) fn pod_name(self, name: String) -> Self {
        Self { pod: Some(name), ..self }
    }

    pub(super) fn container(self, container: &str) -> Self {
        Self { container: Some(container.to_owned()), ..self }
    }

    pub(super) fn gpu(self, gpu: &GpuUuid) -> Self {
        Self { gpu: Some(gpu.to_string()), ..self }
    }

    pub(super) fn detail(self, detail: String) -> Self {
        Self { detail: Some(detail), ..self }
    }

    pub(super) fn error(self, error: &dyn fmt::Display) -> Self {
        Self { error: Some(error.to_string()), ..self }
    }

    /// Returns the fields that are set, with their names in the log.
    fn fields(&self) -> impl Iterator<Item = (&'static str, &String)> {
        let fields = [
            ("node", &self.node),
            ("pod", &self.pod),
            ("container", &self.container),
            ("gpu", &self.gpu),
            ("detail", &self.detail),
            ("error", &self.error),
        ];
        fields.into_iter().filter_map(|(name, value)| Some((name, value.as_ref()?)))
    }
}

/// Writes the message and the fields in one line.
impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message)?;
        self.fields().try_for_each(|(name, value)| write!(f, " {name}={value}"))
    }
}
