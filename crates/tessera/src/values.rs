//! Values that several commands take, each with what to write instead where one cannot be read.

use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

/// `127.0.0.1:5678`, `localhost:5678`, or `:5678` for every address of the machine.
pub(crate) fn address(text: &str) -> Result<SocketAddr, String> {
    let full = match text.strip_prefix("localhost:") {
        Some(port) => format!("127.0.0.1:{port}"),
        None if text.starts_with(':') => format!("0.0.0.0{text}"),
        None => text.to_owned(),
    };
    full.parse()
        .map_err(|_| "write an address and a port, such as 127.0.0.1:5678, or :5678 for all".to_owned())
}

/// Where pages are served, if anywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Listen(pub(crate) Option<SocketAddr>);

impl FromStr for Listen {
    type Err = String;

    /// An [`address`], or `off`.
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self(None)),
            _ => address(text).map(|address| Self(Some(address))),
        }
    }
}

/// `2`, `0.5`.
pub(crate) fn number(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| "write a number, such as 2 or 0.5".to_owned())
}

/// `30s`, `2m`, `90`.
pub(crate) fn time(text: &str) -> Result<Duration, String> {
    let (number, unit) = match text.strip_suffix('m') {
        Some(minutes) => (minutes, 60.0),
        None => (text.strip_suffix('s').unwrap_or(text), 1.0),
    };
    let seconds = number.parse::<f64>().ok().map(|number| number * unit);
    let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.ok_or_else(|| "write a time such as 30s or 2m".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_may_leave_the_host_out() {
        assert_eq!(address(":5678"), Ok(SocketAddr::from(([0, 0, 0, 0], 5678))));
        assert_eq!(address("127.0.0.1:5678"), Ok(SocketAddr::from(([127, 0, 0, 1], 5678))));
        assert_eq!(address("localhost:5678"), address("127.0.0.1:5678"));
        assert_eq!("off".parse(), Ok(Listen(None)));
        for wrong in ["", "5678", "example.com:5678", ":70000", "localhost:", "off:1"] {
            assert!(wrong.parse::<Listen>().is_err_and(|error| error.starts_with("write ")), "{wrong}");
        }
    }

    #[test]
    fn times_have_a_unit_or_are_seconds() {
        assert_eq!(time("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(time("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(time("90"), Ok(Duration::from_secs(90)));
        for wrong in ["", "abc", "-1s", "1h", "nan"] {
            assert!(time(wrong).is_err(), "{wrong}");
        }
    }
}
