// The search of these pages runs in a worker. Browsers start none for a page that was opened from disk (file:), so
// there a hidden frame stands in for it: it runs the worker's script, and messages pass in both directions as copies.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.started = new Promise((resolve, reject) => {
        document.body.append(this.frame)
        const inside = this.frame.contentWindow
        inside.document.open()
        inside.document.write("<!doctype html><body></body>")
        inside.document.close()
        inside.postMessage = (data) => this.deliver(this, data)
        const script = inside.document.createElement("script")
        script.src = address
        script.onload = () => resolve(inside)
        script.onerror = () => reject(new Error(`${address} cannot be loaded`))
        inside.document.body.append(script)
      })
    }

    postMessage(data) {
      this.started.then((inside) => this.deliver(inside, data))
    }

    deliver(target, data) {
      target.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
