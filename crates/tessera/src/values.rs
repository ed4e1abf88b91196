//! Values that several commands accept. Each error says what to write instead.

use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

/// Reasons why a value on the command line is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ValueError {
    #[error("write an address and a port, such as 127.0.0.1:5678, or :5678 for all addresses")]
    Address,
    #[error("write a port such as 12345; the address is always 127.0.0.1")]
    LoopbackPort,
    #[error("write a number, such as 2 or 0.5")]
    Number,
    #[error("write a time such as 30s or 2m")]
    Time,
    #[error("write the node's name in Kubernetes; in a pod, take NODE_NAME from the field spec.nodeName")]
    NodeName,
}

/// Parses `127.0.0.1:5678`, `localhost:5678`, or `:5678` for every address of the host.
pub(crate) fn address(text: &str) -> Result<SocketAddr, ValueError> {
    let full = match text.strip_prefix("localhost:") {
        Some(port) => format!("127.0.0.1:{port}"),
        None if text.starts_with(':') => format!("0.0.0.0{text}"),
        None => text.to_owned(),
    };
    full.parse().map_err(|_| ValueError::Address)
}

/// The address of served pages, or `None` for no pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Listen(pub(crate) Option<SocketAddr>);

impl FromStr for Listen {
    type Err = ValueError;

    /// Parses an [`address`] or `off`.
    fn from_str(text: &str) -> Result<Self, ValueError> {
        match text {
            "off" => Ok(Self(None)),
            _ => address(text).map(|address| Self(Some(address))),
        }
    }
}

/// Parses the name of a node. The host's name is no substitute for an empty one: in a pod it is that of the pod.
pub(crate) fn node_name(text: &str) -> Result<String, ValueError> {
    if text.is_empty() { Err(ValueError::NodeName) } else { Ok(text.to_owned()) }
}

/// Parses a number such as `2` or `0.5`.
pub(crate) fn number(text: &str) -> Result<f64, ValueError> {
    text.parse().map_err(|_| ValueError::Number)
}

/// Parses a time such as `30s`, `2m` or `90`.
pub(crate) fn time(text: &str) -> Result<Duration, ValueError> {
    let (number, unit) = match text.strip_suffix('m') {
        Some(minutes) => (minutes, 60.0),
        None => (text.strip_suffix('s').unwrap_or(text), 1.0),
    };
    let seconds = number.parse::<f64>().ok().map(|number| number * unit);
    let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.ok_or(ValueError::Time)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_may_omit_the_host() {
        assert_eq!(address(":5678"), Ok(SocketAddr::from(([0, 0, 0, 0], 5678))));
        assert_eq!(address("127.0.0.1:5678"), Ok(SocketAddr::from(([127, 0, 0, 1], 5678))));
        assert_eq!(address("localhost:5678"), address("127.0.0.1:5678"));
        assert_eq!("off".parse(), Ok(Listen(None)));
        for wrong in ["", "5678", "example.com:5678", ":70000", "localhost:", "off:1"] {
            assert_eq!(wrong.parse::<Listen>(), Err(ValueError::Address), "{wrong}");
        }
    }

    #[test]
    fn times_have_a_unit_or_are_seconds() {
        assert_eq!(time("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(time("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(time("90"), Ok(Duration::from_secs(90)));
        for wrong in ["", "abc", "-1s", "1h", "nan"] {
            assert_eq!(time(wrong), Err(ValueError::Time), "{wrong}");
        }
    }
}
