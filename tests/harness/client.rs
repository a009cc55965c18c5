//! A client that sends exactly the bytes it is given.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

/// A connection to a gateway.
pub struct Connection {
    reader: BufReader<TcpStream>,
}

#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Connection {
    pub fn open(port: u16) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", port)).expect("a connection");
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        Self { reader: BufReader::new(stream) }
    }

    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.reader.get_mut().write_all(bytes.as_ref()).expect("the gateway reads");
    }

    /// The next response; `None` if the connection ended instead.
    pub fn try_response(&mut self, to_head: bool) -> Option<Response> {
        let mut line = String::new();
        loop {
            line.clear();
            if self.reader.read_line(&mut line).ok()? == 0 {
                return None;
            }
            let status = line.split_whitespace().nth(1)?.parse().ok()?;
            let headers = self.headers()?;
            if status == 100 {
                continue;
            }
            let response = Response { status, headers, body: String::new() };
            let length = response.header("content-length").map_or(0, |length| length.parse().unwrap());
            let mut body = vec![0; if to_head { 0 } else { length }];
            self.reader.read_exact(&mut body).ok()?;
            return Some(Response { body: String::from_utf8(body).unwrap(), ..response });
        }
    }

    fn headers(&mut self) -> Option<Vec<(String, String)>> {
        let mut headers = Vec::new();
        loop {
            let mut line = String::new();
            self.reader.read_line(&mut line).ok()?;
            let line = line.trim_end();
            if line.is_empty() {
                return Some(headers);
            }
            let (name, value) = line.split_once(':')?;
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }

    #[track_caller]
    pub fn response(&mut self) -> Response {
        self.try_response(false).expect("a response")
    }

    /// Sends a request without a body and reads the answer.
    #[track_caller]
    pub fn ask(&mut self, method: &str, path: &str, key: &str) -> Response {
        self.send(request(method, path, key));
        self.try_response(method == "HEAD").expect("a response")
    }

    /// Sends a request to the admin listener, with headers and a body.
    #[track_caller]
    pub fn admin(&mut self, method: &str, path: &str, headers: &str, body: &str) -> Response {
        let length = body.len();
        self.send(format!(
            "{method} {path} HTTP/1.1\r\nHost: admin\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
        ));
        self.response()
    }

    /// Whether the other side is there and sends these bytes back.
    pub fn echoes(&mut self, text: &str) -> bool {
        let mut bytes = vec![0; text.len()];
        self.reader.get_mut().write_all(text.as_bytes()).is_ok()
            && self.reader.read_exact(&mut bytes).is_ok()
            && bytes == text.as_bytes()
    }

    /// Whether the other side closes within `wait`.
    pub fn closes_within(&mut self, wait: Duration) -> bool {
        self.reader.get_ref().set_read_timeout(Some(wait)).unwrap();
        let mut byte = [0];
        loop {
            match self.reader.read(&mut byte) {
                Ok(0) => return true,
                Ok(_) => {}
                // It ended before it had read all that was sent.
                Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
            }
        }
    }
}

impl Response {
    /// The value of a header; panics if it was sent twice.
    #[track_caller]
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.iter().filter(|(known, _)| known == name);
        let value = values.next();
        assert!(values.next().is_none(), "two lines of {name}");
        value.map(|(_, value)| value.as_str())
    }

    #[track_caller]
    pub fn number(&self, name: &str) -> u64 {
        let value = self.header(name).unwrap_or_else(|| panic!("no {name} in {self:?}"));
        value.parse().unwrap_or_else(|_| panic!("{name}: {value}"))
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error} in {:?}", self.body))
    }
}

pub fn request(method: &str, path: &str, key: &str) -> String {
    let key = if key.is_empty() { String::new() } else { format!("X-Api-Key: {key}\r\n") };
    let length = if method == "POST" { "Content-Length: 0\r\n" } else { "" };
    format!("{method} {path} HTTP/1.1\r\nHost: gateway.test\r\n{key}{length}\r\n")
}

/// One request on a connection of its own.
#[track_caller]
pub fn get(port: u16, path: &str, key: &str) -> Response {
    Connection::open(port).ask("GET", path, key)
}
