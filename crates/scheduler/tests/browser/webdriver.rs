//! A client of the WebDriver protocol that drives Chromium through its own driver.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use http_body_util::{BodyExt as _, Full};
use hyper::Request;
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;

/// Flags for running as root and without a network.
const FLAGS: [&str; 12] = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--font-render-hinting=none",
];

/// Longest wait for a change on a page. It is long because the machine may be busy.
const SOON: Duration = Duration::from_secs(40);

/// A browser window.
pub(crate) struct Browser {
    driver: Child,
    authority: String,
    session: String,
    _profile: tempfile::TempDir,
}

impl Browser {
    pub(crate) async fn start() -> Result<Self> {
        const INSTALL: &str = "install it with: apt-get install chromium chromium-driver fonts-noto-cjk";
        let mut driver = Command::new("chromedriver")
            .arg("--port=0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("chromedriver is missing; {INSTALL}"))?;
        let chromium = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
        let binary = chromium.into_iter().find(|path| Path::new(path).exists());
        let binary = binary.with_context(|| format!("chromium is missing; {INSTALL}"))?;
        let output = driver.stdout.take().context("the driver's output")?;
        let mut lines = BufReader::new(output).lines().map_while(|line| line.ok());
        let port = lines.find_map(|line| {
            line.split("successfully on port ").nth(1).map(|port| port.trim_end_matches('.').to_owned())
        });
        // The driver keeps writing, so its output must be read until the end.
        std::thread::spawn(move || lines.for_each(drop));
        let authority = format!("127.0.0.1:{}", port.context("chromedriver named no port")?);
        let profile = tempfile::tempdir()?;
        let mut arguments: Vec<String> = FLAGS.map(str::to_owned).to_vec();
        arguments.push(format!("--user-data-dir={}", profile.path().display()));
        let wanted = json!({"capabilities": {"alwaysMatch": {
            "browserName": "chrome",
            "goog:loggingPrefs": {"browser": "ALL"},
            "goog:chromeOptions": {"binary": binary, "args": arguments},
        }}});
        let answer = send(&authority, "POST", "/session", Some(&wanted)).await?;
        let session = answer["sessionId"].as_str().context("no session")?.to_owned();
        Ok(Self { driver, authority, session, _profile: profile })
    }

    async fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        send(&self.authority, method, &format!("/session/{}{path}", self.session), body).await
    }

    pub(crate) async fn open(&self, url: &str) -> Result<()> {
        // A blank page comes first, because a change of the fragment alone would not load the page.
        self.call("POST", "/url", Some(&json!({"url": "about:blank"}))).await?;
        self.call("POST", "/url", Some(&json!({"url": url}))).await.map(drop)
    }

    /// Evaluates an expression in the page.
    pub(crate) async fn eval(&self, expression: &str) -> Result<Value> {
        let script = json!({"script": format!("return ({expression});"), "args": []});
        self.call("POST", "/execute/sync", Some(&script)).await.with_context(|| expression.to_owned())
    }

    /// Waits until an expression is true in the page.
    pub(crate) async fn until(&self, expression: &str) -> Result<()> {
        let begun = Instant::now();
        while self.eval(&format!("Boolean({expression})")).await? != json!(true) {
            if begun.elapsed() > SOON {
                let text = self.eval("document.body.innerText.slice(0, 1500)").await?;
                bail!(
                    "never came true: {expression}\nthe page reads:\n{}",
                    text.as_str().unwrap_or_default()
                );
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    /// Waits until the page shows a text.
    pub(crate) async fn until_text(&self, text: &str) -> Result<()> {
        self.until(&format!("document.body.innerText.includes({})", json!(text))).await
    }

    /// Clicks the first element that the selector finds, as a mouse would.
    pub(crate) async fn click(&self, selector: &str) -> Result<()> {
        self.until(&format!("document.querySelector({})", json!(selector))).await?;
        let found = json!({"using": "css selector", "value": selector});
        let element = self.call("POST", "/element", Some(&found)).await?;
        let id = element.as_object().and_then(|fields| fields.values().next()).and_then(Value::as_str);
        let path = format!("/element/{}/click", id.context("an element")?);
        self.call("POST", &path, Some(&json!({}))).await.map(drop)
    }

    /// Presses keys one after another.
    pub(crate) async fn press(&self, keys: &[char]) -> Result<()> {
        let actions: Vec<Value> = keys
            .iter()
            .flat_map(|key| ["keyDown", "keyUp"].map(|kind| json!({"type": kind, "value": key.to_string()})))
            .collect();
        let body = json!({"actions": [{"type": "key", "id": "keyboard", "actions": actions}]});
        self.call("POST", "/actions", Some(&body)).await.map(drop)
    }

    /// Sends a command of the Chrome DevTools Protocol.
    pub(crate) async fn cdp(&self, command: &str, parameters: Value) -> Result<Value> {
        self.call("POST", "/goog/cdp/execute", Some(&json!({"cmd": command, "params": parameters}))).await
    }

    pub(crate) async fn size(&self, width: u32, height: u32) -> Result<()> {
        let metrics = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.cdp("Emulation.setDeviceMetricsOverride", metrics).await.map(drop)
    }

    /// Emulates a system that prefers a light or a dark page.
    pub(crate) async fn prefer(&self, scheme: &str) -> Result<()> {
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.cdp("Emulation.setEmulatedMedia", features).await.map(drop)
    }

    /// Returns the errors that the browser logged since the last call.
    pub(crate) async fn complaints(&self) -> Result<Vec<String>> {
        let log = self.call("POST", "/se/log", Some(&json!({"type": "browser"}))).await?;
        let entries = log.as_array().cloned().unwrap_or_default().into_iter();
        let severe = entries.filter(|entry| matches!(entry["level"].as_str(), Some("SEVERE" | "WARNING")));
        Ok(severe.map(|entry| entry["message"].as_str().unwrap_or_default().to_owned()).collect())
    }

    /// Writes a screenshot of the window as PNG.
    pub(crate) async fn screenshot(&self, file: &Path) -> Result<()> {
        let text = self.call("GET", "/screenshot", None).await?;
        std::fs::write(file, base64(text.as_str().context("a picture")?)?)?;
        Ok(())
    }

    pub(crate) async fn close(mut self) -> Result<()> {
        self.call("DELETE", "", None).await?;
        self.driver.kill()?;
        self.driver.wait()?;
        Ok(())
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // This ends the driver and its browser after a failed test.
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

async fn send(authority: &str, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
    let (code, answer) = request(authority, method, path, body.map(Value::to_string)).await?;
    let mut answer: Value = serde_json::from_slice(&answer)?;
    if code != 200 {
        bail!("{path}: {}", answer["value"]["message"].as_str().unwrap_or_default());
    }
    Ok(answer["value"].take())
}

/// Sends one request on its own connection.
pub(crate) async fn request(
    authority: &str,
    method: &str,
    path: &str,
    body: Option<String>,
) -> Result<(u16, Vec<u8>)> {
    let stream = TcpStream::connect(authority).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", authority)
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body.unwrap_or_default())))?;
    let answer = sender.send_request(request).await?;
    let code = answer.status().as_u16();
    Ok((code, answer.into_body().collect().await?.to_bytes().to_vec()))
}

/// Decodes a base64 text.
fn base64(text: &str) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() * 3 / 4);
    let (mut held, mut bits) = (0u32, 0);
    for letter in text.bytes().filter(|letter| *letter != b'=') {
        let value = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => bail!("not base64"),
        };
        held = (held << 6 | u32::from(value)) & 0xff_ffff;
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push((held >> bits & 0xff) as u8);
        }
    }
    Ok(bytes)
}
