// Pages opened from the disk may not start a Worker, which the theme's search runs in: there a hidden frame stands in.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.srcdoc = `<script>postMessage = data => parent.dispatchEvent(
        new CustomEvent("frame-message", {detail: data}))</script><script src="${url}"></script>`
      this.ready = new Promise(done => this.frame.addEventListener("load", done))
      window.addEventListener("frame-message", event => {
        this.dispatchEvent(new MessageEvent("message", {data: event.detail}))
      })
      document.body ? document.body.append(this.frame)
        : document.addEventListener("DOMContentLoaded", () => document.body.append(this.frame))
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data})))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
